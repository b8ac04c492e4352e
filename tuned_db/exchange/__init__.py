"""Export files: lines of JSON, packed and signed."""
