"""From text files to indexed datasets."""
