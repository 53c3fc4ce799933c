//! temporary
use super::disk::Disk;
use std::{io, path::PathBuf, sync::Arc};
pub struct KeyIndex;
impl KeyIndex {
    pub fn open(_d: Arc<dyn Disk>, _p: PathBuf, _r: u64) -> io::Result<(Self, u64)> {
        Ok((Self, u64::MAX))
    }
    pub fn insert_pairs(&self, _p: &[(u64, u64)]) {}
    pub fn insert_all(&self, _p: u64, _h: impl Iterator<Item = u64>) {}
    pub fn due(&self, _p: u64) -> bool {
        false
    }
    pub fn flush(&self, _p: u64) -> io::Result<()> {
        Ok(())
    }
    pub fn merge(&self, _p: u64) -> io::Result<()> {
        Ok(())
    }
    pub fn remove_below(&self, _p: u64) {}
    pub fn lookup(&self, _h: u64, _n: usize, _o: &mut Vec<u64>) -> bool {
        false
    }
}
