"""Environments: what a rollout acts in."""
