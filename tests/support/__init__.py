"""What several test modules use, a module for each subject."""
