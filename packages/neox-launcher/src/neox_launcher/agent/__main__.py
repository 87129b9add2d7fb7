"""`python -m neox_launcher.agent`: the agent that `neox-launch` starts on each host."""

from neox_launcher.agent.agent import main

if __name__ == "__main__":
    main()
