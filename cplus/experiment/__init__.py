"""The engine that demo, studies, jobs and sequences share: material, bank, driver."""
