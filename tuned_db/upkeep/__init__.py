"""Health, history, gc, forget, restore."""
