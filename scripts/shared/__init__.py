"""What several commands share: what run folders hold, tables in Markdown, and how methods are named and drawn."""
