"""What several commands share: options, output, tables, how a command ends."""
