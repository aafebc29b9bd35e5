//! One folder of the cache per model: what lies there, whether it is whole, and how files get in.
//!
//! `models/KEY/` holds the files, `.lock` while a process fetches, `NAME.partial` while a file
//! grows, and `.verified`: a stamp with size, time of change and SHA-256 of each file.

use super::catalog::PinnedFile;
use super::error::{Failure, SourceError};
use super::progress::{Meter, Progress};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The place of one model in the cache; it may not exist yet.
#[derive(Debug)]
pub(super) struct Shelf {
    dir: PathBuf,
    key: String,
}

/// What was verified, and when it is still true.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(super) struct Stamp {
    /// What the user types for this model.
    pub(super) name: String,
    /// The source, for a person.
    pub(super) from: String,
    /// The file to open; none: the folder is the model.
    pub(super) opens: Option<String>,
    /// Every file of the model.
    pub(super) files: Vec<StampedFile>,
}

/// A file as it was when its hash was taken.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(super) struct StampedFile {
    pub(super) name: String,
    pub(super) size_bytes: u64,
    pub(super) sha256: String,
    /// Time of change since 1970; another one means that the hash must be taken again.
    pub(super) modified_ns: u64,
}

/// How closely to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// Sizes only: for a table.
    Stat,
    /// Sizes and times; a hash where the stamp does not cover the file as it is now.
    Stamped,
    /// Every file is hashed.
    Full,
}

/// What was found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing, or nothing finished.
    Absent,
    /// All of it, verified; open this.
    Whole(PathBuf),
    /// A file is missing, truncated or changed.
    Broken(Broken),
}

/// A file of the cache that is not what it should be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Broken {
    file: PathBuf,
    /// One clause, with the numbers.
    pub(super) why: String,
}

/// What a file must be, as far as its source tells beforehand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected<'a> {
    pub(super) name: &'a str,
    pub(super) size_bytes: Option<u64>,
    pub(super) sha256: Option<&'a str>,
}

/// Bytes of a file on their way in.
pub(super) struct Delivery<R> {
    pub(super) reader: R,
    /// Bytes of the partial file that are already here: 0, or what a resumed download skips.
    pub(super) from_byte: u64,
}

const MODELS: &str = "models";
const STAMP: &str = ".verified";
const LOCK: &str = ".lock";
/// Large enough that the hash, not the calls, is the cost.
const COPY_BYTES: usize = 256 << 10;

impl Shelf {
    pub(super) fn new(home: &Path, key: &str) -> Self {
        assert!(is_plain_name(key), "the key {key:?} would leave the cache");
        Self { dir: home.join(MODELS).join(key), key: key.into() }
    }

    /// Every shelf that exists, by key.
    pub(super) fn all(home: &Path) -> Vec<Self> {
        let Ok(entries) = fs::read_dir(home.join(MODELS)) else { return Vec::new() };
        let mut keys: Vec<String> =
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        keys.sort();
        keys.into_iter().filter(|key| is_plain_name(key)).map(|key| Self::new(home, &key)).collect()
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// What the user types for the model that lies here.
    pub(super) fn stamped_name(&self) -> Option<String> {
        Some(self.stamp()?.name)
    }

    /// Bytes on disk of the model that lies here.
    pub(super) fn stamped_bytes(&self) -> Option<u64> {
        Some(self.stamp()?.files.iter().map(|file| file.size_bytes).sum())
    }

    /// Whether the model lies here whole. Takes hashes as `depth` says and then renews the stamp.
    ///
    /// A pinned file that was put here by hand needs no stamp: its checksum speaks for it.
    pub(super) fn check(&self, pinned: Option<&PinnedFile>, depth: Depth) -> Verdict {
        let mut stamp = match (self.stamp(), pinned) {
            (Some(stamp), None) => stamp,
            (Some(stamp), Some(pinned)) if stamp.is_of(pinned) => stamp,
            (None, None) => return Verdict::Absent,
            (_, Some(pinned)) if self.dir.join(pinned.name).is_file() => Stamp::unverified(&self.key, pinned),
            (_, Some(_)) => return Verdict::Absent,
        };
        let mut renewed = false;
        for file in &mut stamp.files {
            match self.check_file(file, depth) {
                Ok(hashed) => renewed |= hashed,
                Err(why) => return Verdict::Broken(Broken { file: self.dir.join(&file.name), why }),
            }
        }
        if renewed {
            // Only a saving: on a cache that can't be written the hash is taken again next time.
            self.seal(&stamp).ok();
        }
        Verdict::Whole(self.path_of(&stamp))
    }

    /// Takes the lock that lets one process write here. Waits for another one, and says so; the
    /// system frees the lock of a process that died.
    pub(super) fn lock(&self, progress: Progress) -> Result<File, SourceError> {
        fs::create_dir_all(&self.dir).map_err(|error| SourceError::cache("create", &self.dir, error))?;
        let path = self.dir.join(LOCK);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|error| SourceError::cache("create", &path, error))?;
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                progress.note(&format!("another process is fetching {}; waiting for it", self.key));
            }
            Err(TryLockError::Error(error)) => return Err(SourceError::cache("lock", &path, error)),
        }
        file.lock().map_err(|error| SourceError::cache("lock", &path, error))?;
        Ok(file)
    }

    /// Removes a broken file, and the stamp that vouched for it.
    pub(super) fn discard(&self, broken: &Broken) -> Result<(), SourceError> {
        for path in [self.dir.join(STAMP), broken.file.clone()] {
            remove(&path)?;
        }
        Ok(())
    }

    /// Bytes of a download that broke off. 0 when it can't be continued safely: without a checksum
    /// to come, nobody would notice that two versions were joined.
    pub(super) fn resumable_bytes(&self, expected: &Expected) -> u64 {
        let partial = fs::metadata(self.partial(expected.name)).map_or(0, |metadata| metadata.len());
        let usable = expected.sha256.is_some() && expected.size_bytes.is_some_and(|size| partial < size);
        if usable { partial } else { 0 }
    }

    /// The file, when it lies here already and is the expected one. Without an expected checksum
    /// the answer is no: it is cheaper to fetch a small file again than to trust it.
    pub(super) fn existing(&self, expected: &Expected) -> Option<StampedFile> {
        let (size_bytes, sha256) = (expected.size_bytes?, expected.sha256?);
        let mut file =
            StampedFile { name: expected.name.into(), size_bytes, sha256: sha256.into(), modified_ns: 0 };
        self.check_file(&mut file, Depth::Full).ok()?;
        Some(file)
    }

    /// Writes a file: to `NAME.partial`, hashed on the way, flushed, compared, renamed.
    pub(super) fn store(
        &self,
        expected: &Expected,
        delivery: Delivery<impl Read>,
        meter: &mut Meter,
    ) -> Result<StampedFile, Failure> {
        let partial = self.partial(expected.name);
        let (size_bytes, sha256) = match self.fill(&partial, expected, delivery, meter) {
            Ok(done) => done,
            Err(Failure::Here(error)) => {
                // A full disk is not helped by half a model.
                fs::remove_file(&partial).ok();
                return Err(Failure::Here(error));
            }
            Err(there) => return Err(there),
        };
        if let Some(wrong) = expected.sha256.filter(|wanted| !wanted.eq_ignore_ascii_case(&sha256)) {
            remove(&partial)?;
            return Err(Failure::There(format!(
                "{} has another checksum: SHA-256 {sha256} instead of {wrong}",
                expected.name
            )));
        }
        let path = self.dir.join(expected.name);
        fs::rename(&partial, &path).map_err(|error| SourceError::cache("rename", &partial, error))?;
        let metadata = fs::metadata(&path).map_err(|error| SourceError::cache("read", &path, error))?;
        Ok(StampedFile {
            name: expected.name.into(),
            size_bytes,
            sha256,
            modified_ns: modified_ns(&metadata),
        })
    }

    /// Declares the model whole: from now on its files are trusted while size and time stand.
    pub(super) fn seal(&self, stamp: &Stamp) -> Result<PathBuf, SourceError> {
        let path = self.dir.join(STAMP);
        let partial = self.partial(STAMP);
        let text = serde_json::to_string_pretty(stamp).expect("strings and numbers always make JSON");
        let written = fs::write(&partial, text).and_then(|()| fs::rename(&partial, &path));
        written.map_err(|error| SourceError::cache("write", &path, error))?;
        // The renames of this folder reach the disk with it. Not every file system can do that.
        if let Ok(dir) = File::open(&self.dir) {
            dir.sync_all().ok();
        }
        Ok(self.path_of(stamp))
    }

    /// A folder for a source's own files, empty. It goes with the returned value.
    pub(super) fn scratch(&self) -> Result<Scratch, SourceError> {
        let dir = self.dir.join(".scratch");
        remove_dir(&dir)?;
        fs::create_dir(&dir).map_err(|error| SourceError::cache("create", &dir, error))?;
        Ok(Scratch(dir))
    }

    fn stamp(&self) -> Option<Stamp> {
        // A stamp that can't be parsed vouches for nothing, as if it weren't there.
        let stamp: Stamp = serde_json::from_slice(&fs::read(self.dir.join(STAMP)).ok()?).ok()?;
        stamp.files.iter().all(|file| is_plain_name(&file.name)).then_some(stamp)
    }

    fn partial(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.partial"))
    }

    fn path_of(&self, stamp: &Stamp) -> PathBuf {
        stamp.opens.as_ref().map_or_else(|| self.dir.clone(), |file| self.dir.join(file))
    }

    /// `Ok(true)` when a hash was taken; the file's time is then updated.
    fn check_file(&self, file: &mut StampedFile, depth: Depth) -> Result<bool, String> {
        let path = self.dir.join(&file.name);
        let metadata =
            fs::metadata(&path).map_err(|error| format!("{} can't be read: {error}", file.name))?;
        if metadata.len() != file.size_bytes {
            return Err(format!("{} has {} bytes instead of {}", file.name, metadata.len(), file.size_bytes));
        }
        let modified_ns = modified_ns(&metadata);
        if depth == Depth::Stat || (depth == Depth::Stamped && modified_ns == file.modified_ns) {
            return Ok(false);
        }
        let sha256 = hash_file(&path).map_err(|error| format!("{} can't be read: {error}", file.name))?;
        if !sha256.eq_ignore_ascii_case(&file.sha256) {
            return Err(format!("{} has SHA-256 {sha256} instead of {}", file.name, file.sha256));
        }
        file.modified_ns = modified_ns;
        Ok(true)
    }

    /// Copies the delivery into the partial file; gives its size and SHA-256.
    fn fill(
        &self,
        partial: &Path,
        expected: &Expected,
        mut delivery: Delivery<impl Read>,
        meter: &mut Meter,
    ) -> Result<(u64, String), Failure> {
        let here = |action, error| {
            let (path, needed_bytes) = (partial.to_owned(), expected.size_bytes);
            Failure::Here(SourceError::Cache { action, path, needed_bytes, error })
        };
        let mut hasher = Sha256::new();
        let mut size_bytes = delivery.from_byte;
        let mut file = if size_bytes > 0 {
            let kept = File::open(partial).map_err(|error| here("read", error))?;
            hash_into(&mut hasher, kept.take(size_bytes)).map_err(|error| here("read", error))?;
            meter.advance(size_bytes);
            let file = OpenOptions::new().append(true).open(partial).map_err(|error| here("write", error))?;
            file.set_len(size_bytes).map_err(|error| here("write", error))?;
            file
        } else {
            File::create(partial).map_err(|error| here("create", error))?
        };
        let mut buffer = vec![0; COPY_BYTES];
        loop {
            let n = match delivery.reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(Failure::There(format!(
                        "{} broke off after {size_bytes} bytes: {error}",
                        expected.name
                    )));
                }
            };
            size_bytes += n as u64;
            if let Some(limit) = expected.size_bytes.filter(|&limit| size_bytes > limit) {
                remove(partial)?;
                return Err(Failure::There(format!("{} is larger than {limit} bytes", expected.name)));
            }
            hasher.update(&buffer[..n]);
            file.write_all(&buffer[..n]).map_err(|error| here("write", error))?;
            meter.advance(n as u64);
        }
        if let Some(wanted) = expected.size_bytes.filter(|&wanted| size_bytes < wanted) {
            return Err(Failure::There(format!(
                "{} ended after {size_bytes} of {wanted} bytes",
                expected.name
            )));
        }
        file.sync_all().map_err(|error| here("write", error))?;
        Ok((size_bytes, hex(hasher)))
    }
}

impl Stamp {
    fn is_of(&self, pinned: &PinnedFile) -> bool {
        matches!(self.files.as_slice(), [file] if file.name == pinned.name
            && file.size_bytes == pinned.size_bytes
            && file.sha256 == pinned.sha256)
            && self.opens.as_deref() == Some(pinned.name)
    }

    fn unverified(key: &str, pinned: &PinnedFile) -> Self {
        Self {
            name: key.into(),
            from: "put here by hand".into(),
            opens: Some(pinned.name.into()),
            files: vec![StampedFile {
                name: pinned.name.into(),
                size_bytes: pinned.size_bytes,
                sha256: pinned.sha256.into(),
                modified_ns: 0,
            }],
        }
    }
}

/// A folder that is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays behind is removed by the next fetch.
        fs::remove_dir_all(&self.0).ok();
    }
}

/// True for a name that stays in its folder and is no file of the cache's own.
pub(super) fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && !name.ends_with(".partial")
        && !name.contains(['/', '\\', '\0', ':'])
}

fn remove(path: &Path) -> Result<(), SourceError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(SourceError::cache("remove", path, error))
        }
        _ => Ok(()),
    }
}

fn remove_dir(path: &Path) -> Result<(), SourceError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(SourceError::cache("remove", path, error))
        }
        _ => Ok(()),
    }
}

fn modified_ns(metadata: &fs::Metadata) -> u64 {
    let since = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    // 64 bits of nanoseconds last until 2554.
    since.map_or(0, |since| since.as_nanos() as u64)
}

fn hash_file(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    hash_into(&mut hasher, File::open(path)?)?;
    Ok(hex(hasher))
}

fn hash_into(hasher: &mut Sha256, mut reader: impl Read) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => hasher.update(&buffer[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
