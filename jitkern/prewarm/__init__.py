"""What calls need, built ahead of the first of them, for any target; nothing here prints."""
