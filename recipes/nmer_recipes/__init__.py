"""Code that the recipes share: configuration, environments, evaluation, logs and checkpoints.

A script of your own may import `load_policy`, `Policy` and `export_policy` from
`nmer_recipes.policy`. The other modules serve the recipes and may change without notice.
"""
