"""The parts of report pages: charts, tables, HTML; pure functions of tables and records."""
