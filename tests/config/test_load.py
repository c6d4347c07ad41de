"""Loading: files, flags, and what is said when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.config.load import load
from paceline.errors import ConfigError

from .conftest import ErrorOf, LoadText
from .sample_models import Adaptive, Config, Env, Fixed, Kind, Limits

BOUND = "integers go from -9223372036854775808 to 9223372036854775807"


def test_no_file_and_no_flag_is_all_defaults(load_text: LoadText) -> None:
    loaded = load_text()
    assert loaded.value == Config()
    assert set(loaded.provenance.values()) == {"default"}


def test_every_leaf_says_which_line_flag_or_default_it_comes_from(load_text: LoadText) -> None:
    loaded = load_text(
        'seed = 3\n[orchestrator]\n\nbatch_size = 32\n[[env]]\nid = "a"\n[[env]]\nid = "b"\nargs.x = [\n1 ]\n',
        flags="--env.1.weight 2 --orchestrator.on-stale=train",
    )
    said = {key: source for key, source in loaded.provenance.items() if source != "default"}
    assert said == {
        "seed": "run.toml:1",
        "orchestrator.batch_size": "run.toml:4",
        "orchestrator.on_stale": "flag",
        "env.0.id": "run.toml:6",
        "env.1.id": "run.toml:8",
        "env.1.weight": "flag",
        "env.1.args.x": "run.toml:9",
    }
    assert loaded.provenance["env.0.limits.max_turns"] == "default"


def test_a_later_file_wins_tables_merge_and_lists_are_replaced(load_text: LoadText) -> None:
    loaded = load_text(
        'seed = 1\nbuckets = [4, 5]\n[orchestrator]\nshuffle = false\nbatch_size = 8\n[[env]]\nid = "a"\n[[env]]\nid = "b"\n',
        'buckets = [6]\n[orchestrator]\nbatch_size = 9\n[[env]]\nid = "c"\n',
    )
    value = loaded.value
    assert (value.seed, value.buckets, value.orchestrator.shuffle, value.orchestrator.batch_size) == (
        1,
        (6,),
        False,
        9,
    )
    assert value.env == (Env(id="c"),)
    assert loaded.provenance["orchestrator.shuffle"] == "run.toml:4"
    assert loaded.provenance["orchestrator.batch_size"] == "2.toml:3"
    assert loaded.provenance["env.0.id"] == "2.toml:5"


def test_choosing_another_union_member_drops_the_keys_that_only_the_old_one_had(load_text: LoadText) -> None:
    first = '[admission]\ntype = "adaptive"\nfloor = 3\neval_share = 0.5\n'
    assert load_text(first, '[admission]\ntype = "fixed"\n').value.admission == Fixed(eval_share=0.5)
    assert load_text(first, flags="--admission.cap 5 --admission.type fixed").value.admission == Fixed(
        cap=5, eval_share=0.5
    )


def test_a_table_is_laid_over_the_default_of_its_section(load_text: LoadText) -> None:
    value = load_text(
        "[orchestrator]\nshuffle = false\n[admission]\nceiling = 50\n[orchestrator.limits]\n"
    ).value
    assert value.orchestrator.batch_size == 16
    assert value.orchestrator.limits == Limits(max_turns=5)
    assert value.admission == Adaptive(floor=4, ceiling=50)


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--seed 4", "seed", 4),
        ("--seed=-4", "seed", -4),
        ("--seed -4", "seed", -4),
        ("--out 7", "out", Path("7")),
        ("--kind fast", "kind", Kind.FAST),
        ("--port 8000", "port", 8000),
        ("--port unix", "port", "unix"),
        ("--level 1", "level", 1),
        ("--level auto", "level", "auto"),
        ("--buckets 3,4", "buckets", (3, 4)),
        ("--buckets [3,4]", "buckets", (3, 4)),
        ("--betas 0.5,1e-1", "betas", (0.5, 0.1)),
        ("--prompt-or-none None", "prompt_or_none", None),
        ("--prompt_or_none 12", "prompt_or_none", "12"),
        ("--anything true", "anything", True),
        ("--anything words", "anything", "words"),
        ("--anything None", "anything", None),
        ("--anything {a=1}", "anything", {"a": 1}),
        ('--anything {"a":[1,null]}', "anything", {"a": [1, None]}),
        ("--anything {a", "anything", "{a"),
        ('--tracker {"cap":3}', "tracker", Fixed(cap=3)),
        ("--tracker {cap=3}", "tracker", Fixed(cap=3)),
        ("--scores.a 3 --scores.b none", "scores", {"a": 3, "b": None}),
        ("--per-site.eu.max-turns 3", "per_site", {"eu": Limits(max_turns=3)}),
        ("--tracker", "tracker", Fixed()),
        ("--tracker --tracker.cap 3", "tracker", Fixed(cap=3)),
        ("--tracker.cap 3 --tracker", "tracker", Fixed(cap=3)),
        ("--tracker.cap 3 --no-tracker", "tracker", None),
        ("--env.0.id a --env.1.id b --env.0.args.k 1", "env", (Env(id="a", args={"k": 1}), Env(id="b"))),
        ("--size-bytes 4k", "size_bytes", 4096),
    ],
)
def test_a_flag_is_read_by_the_type_of_its_place(
    load_text: LoadText, flags: str, key: str, value: object
) -> None:
    found = getattr(load_text(flags=flags).value, key)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("flags", "shuffle"),
    [
        ("--orchestrator.shuffle", True),
        ("--no-orchestrator.shuffle", False),
        ("--orchestrator.shuffle false", False),
        ("--orchestrator.shuffle=true", True),
        ("--no-orchestrator.shuffle --orchestrator.shuffle", True),
    ],
)
def test_a_switch_needs_no_value_and_the_last_one_wins(
    load_text: LoadText, flags: str, shuffle: bool
) -> None:
    assert load_text(flags=flags).value.orchestrator.shuffle is shuffle


def test_a_flag_changes_one_key_of_a_list_item_and_leaves_the_rest(load_text: LoadText) -> None:
    loaded = load_text('[[env]]\nid = "a"\nweight = 3\n[[env]]\nid = "b"\n', flags="--env.1.weight 2")
    assert loaded.value.env == (Env(id="a", weight=3), Env(id="b", weight=2))
    assert loaded.provenance["env.0.weight"] == "run.toml:3"


def test_a_table_in_a_flag_takes_the_place_of_the_one_that_is_there(load_text: LoadText) -> None:
    text = '[[env]]\nid = "a"\n[env.args]\nk = 1\n'
    for flags, args in (
        ("--env.0.args {}", {}),
        ("--env.0.args {j=2}", {"j": 2}),
        ("--env.0.args {} --env.0.args.j 2", {"j": 2}),
        ("--env.0.args.j 2", {"k": 1, "j": 2}),
    ):
        assert load_text(text, flags=flags).value.env == (Env(id="a", args=args),)


def test_an_unknown_key_names_file_line_key_and_the_nearest_right_one(error_of: ErrorOf) -> None:
    assert error_of("seed = 1\n\n[orchestrator]\nbatchsize = 3\n") == (
        "run.toml:4: unknown key 'orchestrator.batchsize'; did you mean 'batch_size'?"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[env]]\nid = "a"\nwieght = 1\n', "run.toml:3: unknown key 'env.0.wieght'; did you mean 'weight'?"),
        (
            '[admission]\ntype = "adaptive"\nflor = 1\n',
            "run.toml:3: unknown key 'admission.flor'; did you mean 'floor'?",
        ),
        (
            "[admission]\ncap = 1\n",
            "run.toml:2: unknown key 'admission.cap': it belongs to type = \"fixed\"",
        ),
        (
            '[[env]]\nid = "a"\nadmission = { type = "fixed", caps = 3 }',
            "run.toml:3: unknown key 'env.0.admission.caps'; did you mean 'cap'?",
        ),
        (
            "[per_site.eu]\nmaxturns = 1",
            "run.toml:2: unknown key 'per_site.eu.maxturns'; did you mean 'max_turns'?",
        ),
        ("batch_size = 1", "run.toml:1: unknown key 'batch_size'; did you mean 'orchestrator.batch_size'?"),
        (
            "[tracker]\nzzz = 1",
            "run.toml:2: unknown key 'tracker.zzz'; [tracker] knows type, cap, eval_share",
        ),
    ],
)
def test_the_nearest_key_is_sought_where_the_wrong_one_stands(
    error_of: ErrorOf, text: str, message: str
) -> None:
    assert error_of(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[orchestrator]\nbatch_size = "many"',
            'run.toml:2: orchestrator.batch_size = "many": expected integer, at least 1',
        ),
        ('seed = "64"', 'run.toml:1: seed = "64": expected integer'),
        ("seed = true", "run.toml:1: seed = true: expected integer"),
        ("seed = 1.5", "run.toml:1: seed = 1.5: expected integer"),
        ("[orchestrator]\nshuffle = 1", "run.toml:2: orchestrator.shuffle = 1: expected true or false"),
        ("out = 3", "run.toml:1: out = 3: expected path"),
        ("orchestrator = 3", "run.toml:1: orchestrator = 3: expected table"),
        ("env = 3", "run.toml:1: env = 3: expected list of table"),
        ("buckets = [\n1,\n'x']", 'run.toml:3: buckets.1 = "x": expected integer'),
        ("betas = [1.0]", "run.toml:1: betas lacks item 1 (number)"),
        (
            "betas = [1, 2, 3]",
            "run.toml:1: betas = [1, 2, 3]: expected list of number (Tuple should have at most 2 items",
        ),
        (
            "[admission]\nceiling = 0",
            'run.toml:2: admission.ceiling = 0: expected integer, at least 1, or "none"',
        ),
        (
            '[orchestrator]\non_stale = "dorp"',
            'run.toml:2: orchestrator.on_stale = "dorp": expected "drop" | "train"; did you mean "drop"?',
        ),
        ('kind = "fsat"', 'run.toml:1: kind = "fsat": expected "fast" | "safe"; did you mean "fast"?'),
        (
            '[admission]\ntype = "fixde"',
            'run.toml:2: admission.type = "fixde": expected "fixed" | "adaptive"; did you mean "fixed"?',
        ),
        (
            "[[env]]\nid = 'a'\n[env.admission]\ncap = 3",
            'run.toml:3: [env.admission] (env.0.admission) does not say its type: expected type = "fixed" or "adaptive"',
        ),
        ('size_bytes = "4q"', 'run.toml:1: size_bytes = "4q": expected integer'),
        ("port = 1.5", "run.toml:1: port = 1.5: expected integer | text"),
        ("seed = 9223372036854775808", f"run.toml:1: seed = 9223372036854775808: expected integer ({BOUND})"),
        (
            "buckets = [1, -9223372036854775809]",
            f"buckets.1 = -9223372036854775809: expected integer ({BOUND})",
        ),
        (
            "anything.x = [1e9, 100000000000000000000]",
            f"anything.x.1 = 100000000000000000000: expected anything ({BOUND})",
        ),
        (
            "[orchestrator.limits]\ndeadline_s = inf",
            "deadline_s = inf: expected number, above 0 (a finite one)",
        ),
        (
            '[admission]\ntype = "fixed"\neval_share = -1e400',
            "eval_share = -inf: expected number (a finite one)",
        ),
    ],
)
def test_a_bad_value_names_file_line_key_value_and_what_is_expected(
    error_of: ErrorOf, text: str, message: str
) -> None:
    assert message in error_of(text)


def test_a_bad_item_is_not_told_a_second_time_as_a_list_that_is_too_short(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "m"\n[[env]]\nid = "a"\nweight = 0\n')
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, [file])
    assert str(caught.value) == f"{file}:5: env.0.weight = 0: expected number, above 0"
    file.write_text('env = []\n[model]\nname = "m"\n')
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, [file])
    assert str(caught.value) == f"{file}:1: env = []: expected list of table, at least 1 item"


def test_a_missing_key_is_named_with_its_section(error_of: ErrorOf) -> None:
    assert error_of('[[env]]\nid = "a"\n\n[[env]]\nweight = 1\n') == (
        "run.toml:4: [[env]] (env.1) lacks the required key 'id' (text)"
    )


def test_a_flag_that_was_meant_for_the_only_item_says_that_items_count_from_0(error_of: ErrorOf) -> None:
    one, two = '[[env]]\nid = "a"\n', '[[env]]\nid = "a"\n[[env]]\nid = "b"\n'
    assert error_of(one, flags="--env.1.weight 2") == (
        "flag --env.1.weight: [[env]] (env.1) lacks the required key 'id' (text): the flag makes a new item, with 1 before it, "
        "as they count from 0"
    )
    assert error_of(one, flags="--env.2.weight 2") == (
        "flag --env.2.weight: env has 1 item, --env.0, as they count from 0; --env.1 makes another"
    )
    assert error_of(two, flags="--env.3.weight 2") == (
        "flag --env.3.weight: env has 2 items, --env.0 to --env.1, as they count from 0; --env.2 makes another"
    )


def test_a_contradiction_is_told_at_its_section_with_the_places_of_both_values(error_of: ErrorOf) -> None:
    assert error_of("seed = 1\n[admission]\nfloor = 9\n", flags="--admission.ceiling 5") == (
        "run.toml:2: [admission]: floor 9 > ceiling 5: lower floor to fit "
        "(floor is set by run.toml:3; ceiling is set by flag --admission.ceiling)"
    )


def test_a_contradiction_across_sections_is_told_at_the_last_value_it_names(error_of: ErrorOf) -> None:
    text = '[orchestrator]\nbatch_size = 1\n[[env]]\nid = "a"\n[[env]]\nid = "b"\n'
    assert error_of(text) == (
        "run.toml:2: orchestrator.batch_size is less than the 2 environments "
        "(orchestrator.batch_size is set by run.toml:2)"
    )


def test_all_that_is_wrong_is_told_at_once_in_the_order_of_the_files(error_of: ErrorOf) -> None:
    message = error_of(
        'seed = "x"\nsed = 1\n[orchestrator]\nbatch_size = 0\n',
        "[admission]\nfloor = 5000\n[[env]]\nweight = -1\n",
        flags="--tracker.cap 0 --bach 3 word",
    )
    places = [line.strip().split(": ")[0] for line in message.splitlines()]
    assert places == [
        "9 things are wrong in the configuration:",
        "run.toml:1",
        "run.toml:2",
        "run.toml:4",
        "2.toml:1",
        "2.toml:3",
        "2.toml:4",
        "flag --tracker.cap",
        "flag --bach",
        "unexpected argument 'word'",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--orchestrator.batchsize 3", "unknown option; did you mean --orchestrator.batch-size?"),
        ("--orchestratr.batch-size 3", "unknown option; did you mean --orchestrator.batch-size?"),
        ("--batch-size 3", "unknown option; did you mean --orchestrator.batch-size?"),
        ("--no-orchestrator.shufle", "unknown option"),
        ("--seed.x 3", "--seed is a plain value (integer), with nothing inside"),
        ("--env.2.id x", "env has no item yet, and items count from 0: --env.0 makes the first"),
        ("--env.first.id x", "--env is a list, whose items go by number: --env.0.id"),
        ("--seed", "needs a value: integer"),
        ("--no-seed", "cannot be switched off: it takes integer"),
        ("--no-orchestrator", "cannot be switched off: it takes table"),
        ("--orchestrator {batch_size:3}", "is neither TOML, as { a = 1 }, nor JSON: "),
    ],
)
def test_a_flag_that_cannot_be_followed_says_why(error_of: ErrorOf, flags: str, message: str) -> None:
    told = error_of(flags=flags)
    assert told.startswith(f"flag {flags.split()[0]}: ")
    assert message in told


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a = \nb = 2\n", "run.toml:1: "),
        ("a = 1\nb = 2\n[c", "run.toml:3: "),
        ("a = 1\na = 2\n", "run.toml:2: "),
    ],
)
def test_a_syntax_error_names_its_line(error_of: ErrorOf, text: str, place: str) -> None:
    assert error_of(text).startswith(place)


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"\n')
    with pytest.raises(ConfigError) as caught:
        load(Config, [tmp_path / "none.toml", tmp_path / "latin.toml", tmp_path])
    for words in ("none.toml: cannot be read: No such file", "latin.toml: is not UTF-8", "Is a directory"):
        assert words in str(caught.value)


def test_none_is_a_word_where_none_is_possible_and_a_text_where_it_is_not(load_text: LoadText) -> None:
    value = load_text(
        'prompt_or_none = "none"\n[admission]\nceiling = "none"\n[[env]]\nid = "none"\n'
        'args = { mode = "none", limit = "<none>" }\n'
    ).value
    assert value.prompt_or_none is None
    assert isinstance(value.admission, Adaptive)
    assert value.admission.ceiling is None
    assert value.env[0].id == "none"
    assert value.env[0].args == {"mode": "none", "limit": None}


def test_values_out_of_files_are_not_shared_with_defaults(load_text: LoadText) -> None:
    load_text(flags="--buckets.0 9")
    assert Config().buckets == (1, 2)
    assert load_text(flags="--buckets.0 9").value.buckets == (9, 2)
