"""`python -m vox_host`: the command line."""

from vox_host.entry import main

if __name__ == "__main__":
    main()
