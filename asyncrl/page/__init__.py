"""The page of a run: one HTML file that reads the run's topics from a browser, and the report with the data inside."""
