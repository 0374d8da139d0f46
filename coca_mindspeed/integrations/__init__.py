"""CoCA in the trainers of other frameworks: TRL (:mod:`.trl`) and ms-swift (:mod:`.ms_swift`); see docs/frameworks.md.

No other module of the package imports these.
"""
