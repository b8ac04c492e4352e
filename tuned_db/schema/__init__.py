"""Tables, their version, migrations."""
