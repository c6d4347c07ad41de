"""`paceline config`: what can be configured, and what a config comes to."""

from __future__ import annotations

import argparse
import json

from paceline.cli.options import add_config_argument, load_config

_STUDIES = " A study file is TOML, for `paceline simulate STUDY.toml`; [simulator.md](../simulator.md) says what studies are."
"""What the reference of studies says beside its keys."""

TAKES_CONFIG = frozenset({"show"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser(
        "show", allow_abbrev=False, help="the resolved config as TOML, with where each value comes from"
    )
    add_config_argument(show)
    reference = verbs.add_parser("reference", help="every option with its default and meaning, as Markdown")
    reference.add_argument(
        "--study", action="store_true", help="those of a study file of `paceline simulate`"
    )
    verbs.add_parser("schema", help="JSON schema of the config file, for editors")


def run(args: argparse.Namespace) -> int:
    if args.verb == "show":
        from paceline.config.dump import dump

        loaded = load_config(args)
        print(dump(loaded.value, loaded.provenance), end="")
        return 0
    from paceline.config import RunConfig
    from paceline.config.reference import json_schema, markdown

    if args.verb == "reference" and args.study:
        from paceline.sim.study import StudyConfig

        print(markdown(StudyConfig, "Studies", _STUDIES), end="")
    elif args.verb == "reference":
        print(markdown(RunConfig), end="")
    else:
        print(json.dumps(json_schema(RunConfig), indent=2))
    return 0
