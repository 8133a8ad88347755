"""Other libraries' names for zcomm's parts, so that scripts migrate by changing their import line."""
