"""What runs inside a task: a recipe's training or evaluation, a server, or a user's command."""
