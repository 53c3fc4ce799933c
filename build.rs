//! Compiles `proto/` without protoc, so that a fresh clone builds with cargo alone.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

const FILES: [&str; 3] = ["holdfast/v1/message.proto", "holdfast/v1/broker.proto", "holdfast/v1/admin.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let descriptors = protox::compile(FILES, ["proto"])?;
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".holdfast.v1.Message.body").compile_fds(descriptors)?;
    Ok(())
}
