"""The command `neox-report`: a page about one or several runs, and a plot of the loss, from their records."""
