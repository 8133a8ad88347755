"""Parts that the benches of a GPU share; each ends with 77 and one line where none is."""
