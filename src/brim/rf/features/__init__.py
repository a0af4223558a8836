"""What a receiver measures of a recording."""
