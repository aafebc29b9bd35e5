//! The one place of this crate with `unsafe`: a file as bytes in memory.

use crate::error::WeightsError;
use crate::tensor::Owner;
use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Maps a regular file for reading. Pages come in as they are touched; the mapping lives until the
/// last [`Tensor`](crate::Tensor) of it is dropped.
///
/// The file must not be truncated while it is in use: touching a page that is gone is a bus error,
/// on every system that maps files. Replacing a checkpoint by renaming a new one over it is fine.
pub(crate) fn map(path: &Path) -> Result<Owner, WeightsError> {
    let io = |source| WeightsError::Io { path: path.to_owned(), source };
    // Asked before opening: opening a pipe would wait for its other end.
    let kind = std::fs::metadata(path).map_err(io)?;
    if !kind.is_file() {
        let found = if kind.is_dir() { "it is a folder" } else { "it is not a regular file" };
        return Err(WeightsError::NoCheckpoint { path: path.to_owned(), found: found.into() });
    }
    let file = File::open(path).map_err(io)?;
    Ok(Arc::new(map_file(&file).map_err(io)?))
}

#[allow(unsafe_code)]
fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is private and read-only, so this process can't change it through any path.
    // Another process could write to the file below us. All that is read from the mapping are plain
    // numbers (u8, and floats assembled from them), for which any bytes are valid; lengths, offsets and
    // text are copied out before they are checked, so nothing that was checked can change afterwards.
    // A file that shrinks raises SIGBUS, which ends the process: a crash, no unsound access.
    unsafe { MmapOptions::new().map_copy_read_only(file) }
}
