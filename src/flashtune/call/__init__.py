"""`attention()`: arrays of each library, validation, the memo of ready calls."""
