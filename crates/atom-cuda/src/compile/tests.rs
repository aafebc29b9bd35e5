#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

use super::*;

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("atom-cuda-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
fn what_was_remembered_is_recalled_whole_or_not_at_all() {
    let folder = folder("cache");
    let file = folder.join("step-sm_90a-0.cubin");
    assert_eq!(recall(&file), None);
    remember(&file, b"an image").unwrap();
    assert_eq!(recall(&file).as_deref(), Some(&b"an image"[..]));
    // Nothing else is left beside it.
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    let whole = std::fs::read(&file).unwrap();
    for damage in [&whole[..whole.len() - 1], &whole[..DIGEST], &whole[..7], &[]] {
        std::fs::write(&file, damage).unwrap();
        assert!(recall(&file).is_none_or(|cubin| cubin != b"an image"), "{} bytes", damage.len());
    }
    let mut changed = whole.clone();
    changed[DIGEST] ^= 1;
    std::fs::write(&file, changed).unwrap();
    assert_eq!(recall(&file), None);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_cache_that_cannot_be_written_says_so() {
    let folder = folder("file");
    std::fs::write(&folder, b"not a folder").unwrap();
    assert!(remember(&folder.join("a.cubin"), b"image").is_err());
    std::fs::remove_file(folder).unwrap();
}

#[test]
fn every_source_has_a_variant_to_compile_and_a_name_of_its_own() {
    let mut names: Vec<_> = crate::kernels::SOURCES.iter().map(|source| source.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), crate::kernels::SOURCES.len());
    for source in crate::kernels::SOURCES {
        assert!(source.programs().next().is_some(), "{} is never compiled in CI", source.name);
    }
}
