"""From a list of indices to a batch in memory."""
