"""What is launched: configs, plans, tensor maps."""
