"""CoCA in the trainers of other frameworks; see docs/frameworks.md and docs/slime.md.

TRL (:mod:`.trl`), ms-swift (:mod:`.ms_swift`), slime and vime (:mod:`.slime`).  No other module of the package imports
these.
"""
