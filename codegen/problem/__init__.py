"""What is asked for, which keys a query sees, what is right (NumPy reference), how near a result must be."""
