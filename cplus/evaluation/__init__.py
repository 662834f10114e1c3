"""What was kept, lost and learned: judges, Retention and Acquisition, statistics."""
