"""Folds over a journal: the account, the rows of metrics, the timeline; and what shows them.

Everything here reads `domain` and nothing else. `RunFolds` bundles the folds, `Monitor` feeds them in a live run.
"""
