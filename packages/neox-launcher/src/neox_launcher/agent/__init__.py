"""The agent of one host: receives orders, starts its workers and supervises them."""
