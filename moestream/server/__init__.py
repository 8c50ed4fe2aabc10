"""Running llama-server: its arguments, its process, its records on disk, and what it answers.

``arguments``  settings to a command line (pure)
``address``    is this address free, and who has it if not
``client``     GET /health, /props, /moe/stats
``guard``      the small program between us and llama-server; see to it that no orphan stays
``process``    the state machine of one llama-server process; one thread writes it
``records``    the state files that let ``stop``, ``status`` and ``logs`` find a server
``supervise``  the above together, in this process or in a detached one
``report``     the same facts as text
"""
