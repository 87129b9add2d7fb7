"""`python -m neox_data.preprocess` is `preprocess_data`."""

from neox_data.preprocess.cli import main

if __name__ == "__main__":
    main()
