"""The gate inside other people's trainers. Each module imports its own package and nothing of the others."""
