"""What the files of a checkpoint hold, and which of them are kept."""
