//! Newtypes for everything that is counted from zero and must not be mixed up.

use std::fmt;

/// A vocabulary entry. Plain, since it meets every boundary of the program: JSON, kernels, caches.
pub type TokenId = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// One device and the OS thread that owns it, counted over the whole mesh.
    RankId(u16)
);
id!(
    /// The ranks that share requests and KV bookkeeping, counted over the whole mesh.
    LaneId(u16)
);
id!(
    /// One sampled continuation: a request with `n` choices becomes `n` of these.
    RequestId(u64)
);
id!(
    /// A page of the KV cache. Page 0 is the Sink: never leased, where padding rows read and write.
    PageId(u32)
);
id!(
    /// A row of per-request device state. Slot 0 is the Sink.
    SlotId(u32)
);
id!(
    /// A step of a group, counted from 1; 0 means that none ran yet.
    StepNo(u64)
);

impl PageId {
    /// The page that nobody owns.
    pub const SINK: Self = Self(0);
}

impl SlotId {
    /// The slot that nobody owns.
    pub const SINK: Self = Self(0);
}
