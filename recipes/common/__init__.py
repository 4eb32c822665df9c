"""What the recipes share: configuration, environments, evaluation, logs and checkpoints."""
