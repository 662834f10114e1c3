"""The gate in other trainers and frameworks; each module imports only the package that it integrates."""
