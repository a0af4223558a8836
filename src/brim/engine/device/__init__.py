"""Which device there is, how much memory it has, and what it draws."""
