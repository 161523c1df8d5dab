"""What several commands share: what run folders hold, and tables in Markdown."""
