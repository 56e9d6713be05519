"""The tour: every verb once, in minutes, and one page with what was measured beside what the papers measured."""
