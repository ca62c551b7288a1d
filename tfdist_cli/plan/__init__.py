"""What a launch will do, as plain values: tasks, addresses, resources, environment variables, warnings."""
