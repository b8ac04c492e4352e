"""`tune()`: a measured or a predicted run, presets, problem files."""
