//! In which order sums are added, and so whether a row's bits may depend on what else a step computes.

/// Chosen when a model is planned, for all of its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SumOrder {
    /// Each bucket has the kernels that are fastest for its rows. Their sums differ in order, so a request's bits depend on
    /// the buckets that its steps happened to use.
    #[default]
    Fastest,
    /// One order of every sum, whatever the bucket (`--deterministic`): a request has the same bits alone or among
    /// others, at any chunking, cold or warm, after a preemption.
    Fixed,
}
