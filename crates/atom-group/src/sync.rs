//! The primitives under [`crate::Meeting`]: the standard library's, or a model checker's in this
//! crate's own unit tests, so that the code that ships is the code that is explored.

#[cfg(test)]
pub(crate) use shuttle::{
    hint::spin_loop,
    sync::{
        Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};
#[cfg(not(test))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{
        Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};
