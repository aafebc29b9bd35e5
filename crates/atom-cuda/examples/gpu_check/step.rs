//! The beginning of a step.

use crate::kit::Kit;
use atom_cuda::{CudaError, launch::step};

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    for count in [0, 1, 7, 5000] {
        let before: Vec<u32> = (0..8192).map(|_| kit.word() as u32).collect();
        let mut expected = before.clone();
        let mut updates = Vec::new();
        for place in (0..count).map(|i| (i * 3 + 1) % 8192) {
            let page = kit.word() as u32;
            expected[place] = page;
            updates.extend([place as u32, page]);
        }
        updates.extend([0; 2]);
        let (tables, updates) = (kit.upload_words(&before)?, kit.upload_words(&updates)?);
        let header = kit.header(&[(6, count as u32)])?;
        // SAFETY: the arrays are as long as the header says and live until they are read back.
        unsafe {
            step::update_tables(&kit.queue(), header.address(), updates.address(), tables.address())?;
        }
        let found = kit.download_words(&tables)?;
        kit.equal(&format!("{count} table entries"), &found, &expected);
    }
    Ok(())
}
