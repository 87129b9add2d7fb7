"""Launch plans and the checks before a launch; no process is started and no host is contacted."""
