//! What a broker takes while nothing happens.

use std::{fs, os::unix::fs::MetadataExt};

use crate::harness::*;

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn an_idle_broker_takes_at_most_32_mib_of_memory_and_32_mib_of_disk() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 4).await;
    client.send("t", 0, &["x"]).await;
    let disk: u64 = files_below(&broker.data_dir())
        .unwrap()
        .iter()
        .map(|(path, _)| fs::metadata(path).map_or(0, |found| found.blocks() * 512))
        .sum();
    assert!(disk <= 32 * MIB, "{disk} bytes on disk: {:?}", files_below(&broker.data_dir()));
    // The budget is that of the binary people run; one with debug assertions is larger.
    let resident = broker.resident() as u64;
    if std::env::var_os("HOLDFAST_BIN").is_some() {
        assert!(resident <= 32 * MIB, "{resident} bytes resident");
    }
}
