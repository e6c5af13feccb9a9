"""The multi-turn tool loop, and what decides its turns."""
