"""Hostile files, records, archives and answers of servers; the README has each one, and what must happen."""
