"""What every field of every kind's config means, with its unit: for the API's document and for forms made from it.

The library has the same as comments beside its fields, where no program can read them. A field that several kinds
share with one meaning stands in SHARED; nested ones are named with a dot.
"""

from collections.abc import Mapping
from typing import Any, Final

SHARED: Final[dict[str, str]] = {
    "accelerator": "Where it computes; auto: the worker's own device, a GPU where there is one.",
    "devices": 'Devices of this machine that share the work: a number or "all"; on a CPU, so many processes.',
    "cluster": "Whether it runs on the cluster that the service was started with.",
    "epochs": "Times that every training item is seen.",
    "learning_rate": "AdamW's highest, after a warm-up; a cosine to 0 follows.",
    "tier": "Where the data is held: in the GPU's memory, the host's, or a window of it; auto: the fastest it fits in.",
    "preload_to_gpu": "Whether data goes to the GPU's memory before training; a tier that is named decides instead.",
    "precision": "Of the forward pass; auto: bf16 or fp16 on a GPU, fp32 on a CPU.",
    "early_stopping_patience": "Epochs without a better validation loss after which training ends; null: never.",
    "checkpoint_every_s": "Seconds between checkpoints: the most training that a killed worker loses.",
    "num_workers": "Processes that read data; nothing here needs any.",
}
OWN: Final[dict[str, dict[str, str]]] = {
    "rf.generate": {
        "num_samples": "Samples to make: transmissions that pass the gates.",
        "preset": "Values to begin with; fields that are given come before it.",
        "dataset_type": "feature_based: features of each receiver alone; iq_raw: their IQ records too, far larger.",
        "seed": "A sample depends on the config, on this and on its number alone.",
        "frequency_mhz": "Carrier, MHz.",
        "tx_power_dbm": "Power of the transmitter, dBm; 30 is 1 W, 40 is 10 W.",
        "min_snr_db": "A receiver hears a transmission from this SNR on, dB in the 12.5 kHz channel.",
        "max_gdop": "Samples with a poorer geometry are refused; 20 is strict, 100 is lenient.",
        "min_receivers": "Samples that fewer receivers hear are refused; 3 place a transmitter in the plane.",
        "use_random_receivers": "5 to 10 random receivers for each sample instead of the stations.",
        "inside_ratio": "Share of transmitters inside the receivers' bounding box.",
        "stations": "The receivers.",
        "stations.name": "Of the station.",
        "stations.lat": "Latitude, degrees.",
        "stations.lon": "Longitude, degrees.",
        "stations.alt": "Height of the ground above the WGS-84 ellipsoid, m.",
        "tx_antenna_m": "Height of the transmitter's antenna above ground, m; 2 is a hand-held or a car.",
        "rx_antenna_m": "Height of the receivers' antennas above ground, m; 30 is a mast.",
        "tx_gain_dbi": "Gain of the transmitter's antenna, dBi.",
        "rx_gain_dbi": "Gain of the receivers' antennas, dBi.",
        "loss": "How power falls with distance.",
        "loss_exponent": "Slope of log_distance beyond 1 km; free space is 2.",
        "shadowing_db": "Standard deviation of what hills and houses take of each link, dB.",
        "environment": "Man-made noise and the type of area of hata.",
        "noise_figure_db": "Of the receivers, dB.",
        "waveform": "What is transmitted.",
        "fading": "Of each link: with a direct path (rician), without one (rayleigh), or none.",
        "rician_k_db": "Direct over scattered power of rician fading, dB.",
        "max_frequency_offset_hz": "Oscillators are off by up to ± this, Hz.",
        "clock_sigma_s": "Standard deviation of a station's clock, s; 1e-6 is one disciplined by GPS.",
        "duration_s": "Of a record, s, a multiple of 0.2.",
        "samples_per_shard": "Samples of a file; 0: 512, or 8 with IQ records.",
        "batch_size": "Samples made at once; null: what the memory takes. It changes nothing in the dataset.",
    },
    "rf.train": {
        "dataset_ids": "Ids of the rf datasets to train on, made with equal settings.",
        "batch_size": "Samples of a step.",
        "seed": "Of the split, the first weights, the order and the dropout.",
        "val_share": "Share of the samples held out to judge by.",
        "hybrid": "Start from the solver's answer; off: the network alone.",
    },
    "rf.evaluate": {
        "dataset_ids": "Id of the rf dataset to locate, one that the run was not trained on.",
        "run_id": "Id of the locator's run.",
    },
    "segment.tune": {
        "models": "Networks to tune; null: all that are built in.",
        "model": "One network, instead of several.",
        "run_id": "Id of a run whose weights to tune with; null: weights as they are made.",
        "size": "Side of the images, pixels.",
        "seconds": "To spend on each network, compilation apart.",
        "p95_ms": "Longest time that 95 of 100 batches may take, ms; null: any.",
        "search": "What to vary besides the batch size.",
        "reserve": "Share of the memory left alone.",
        "tolerance": "Share of pixels that a faster setting may change.",
    },
    "segment.predict": {
        "dataset_ids": "Ids of the image datasets to predict.",
        "run_id": "Id of the run whose weights predict.",
        "model": "The network; null: the run's own.",
        "format": "Of the files it makes.",
        "batch_size": "Patches that the network sees at once; null: as tuned.",
        "threshold": "Probability from which a pixel is foreground.",
        "detect_holes": "Whether polygons may have holes.",
        "strict": "Every patch alone: the same bits whatever else is predicted; slower.",
        "tile": "Larger images are cut into windows of this side, pixels, and blended.",
        "resize": "Instead of windows, every image is seen at this side, pixels; null: windows.",
        "overlap": "Pixels that windows share; null: an eighth of the tile.",
    },
    "segment.train": {
        "dataset_ids": "Id of the dataset of images with masks to train on.",
        "run_id": "Id of a run whose weights to begin from; null: new ones.",
        "model": "The network.",
        "size": "Side of a crop, pixels at the images' own scale.",
        "batch_size": "Crops of a step; one that does not fit is worked off in parts.",
        "seed": "Of the split, the first weights, the order and the augmentation.",
        "val_fraction": "Share of the images, at least one, held out to judge by.",
        "augment": "Whether crops are changed at random, so that more is learnt from few.",
        "augmentation": "How much crops are changed; every range is symmetric about no change.",
        "augmentation.turn": "Mirrored and turned by quarters.",
        "augmentation.affine": "Share of crops that are scaled, rotated and shifted.",
        "augmentation.scale": "Up to 1 ± this.",
        "augmentation.rotation_deg": "Up to ± this, degrees.",
        "augmentation.shift": "Up to ± this share of a side.",
        "augmentation.brightness": "Up to ± this share of full scale, added.",
        "augmentation.contrast": "A factor of up to 1 ± this about the crop's mean.",
        "augmentation.gamma": "An exponent of up to e to the ± this.",
        "augmentation.noise": "Greatest standard deviation, share of full scale.",
    },
    "sequence.train": {
        "dataset_ids": "Id of the packed corpus to train on.",
        "mode": "self: without labels; supervised: on them.",
        "iterations": "self: rounds of encoder, clusters and classifier.",
        "epochs": "Of every phase that is not named itself; null: as the phases say.",
        "encoder_epochs": "self: of the encoder in each round.",
        "classifier_epochs": "self: of the classifier in each round; supervised: in all.",
        "batch_size": "Sequences of a step.",
        "max_frames": "Frames of a step, padding included, instead of a number of sequences; null: by number.",
        "weight_decay": "AdamW's, per step and learning rate.",
        "label_smoothing": "Share of a true class that is spread over all.",
        "compile": "How a step is made fast; auto: a captured graph for each length on a GPU.",
        "autotune": "Whether cuDNN tries its algorithms for every shape of batches.",
        "num_workers": "Processes that read a folder that is not packed; a packed corpus needs none.",
        "prefetch_factor": "Batches that each of them reads ahead.",
        "seed": "Of the split, the first weights, the order, the augmentation and the clusters.",
        "members": "supervised: networks trained one after the other, whose probabilities are averaged.",
        "clusters": "self: kinds looked for; null: as many as there are classes, 10 without labels.",
        "restarts": "self: of k-means.",
        "fine_tune": "self: whether the classifier trains the encoder too.",
        "val_fraction": "supervised: share of the training items to choose the best weights by; 0: the last ones.",
        "holdout": "Share of the labelled items to score on, where the corpus has no split of its own.",
        "model": "The encoder's shape.",
        "model.channels": "Of the convolutions.",
        "model.kernel": "Frames that a convolution sees, odd.",
        "model.convolutions": "How many.",
        "model.hidden": "Units of the LSTM in a direction; up to 128 a GPU keeps all of it in one kernel.",
        "model.layers": "Of the LSTM.",
        "model.attention": "Width of the attention's hidden layer.",
        "model.embedding": "Numbers that a sequence becomes.",
        "model.dropout": "Share of values left out, at random, in training.",
        "model.reverse": "How the LSTM's reverse direction finds each sequence's end.",
        "model.concurrent": "With gather: both directions at once.",
        "model.normalise": "Whether frames are scaled by the corpus's mean and spread.",
        "augmentation": "The greatest changes of a sequence; null: none, in supervised mode.",
        "augmentation.crop": "Share of a sequence that is cut away at its ends.",
        "augmentation.noise": "Standard deviation, in units of the features' own.",
        "augmentation.time_masks": "Stretches of frames that are hidden.",
        "augmentation.time_width": "Of one of them, share of the sequence.",
        "augmentation.feature_masks": "Bands of features that are hidden.",
        "augmentation.feature_width": "Of one of them, share of the features.",
        "variants": "supervised: augmented copies made once and used in turn; 0: new ones at every step.",
        "objective": "How an encoder learns without labels.",
        "objective.temperature": "Of the contrast: smaller looks harder at the nearest others.",
        "objective.contrast": "Weight of the contrastive loss.",
        "objective.reconstruction": "Weight of the hidden frames.",
        "objective.projection": "Width in which views are compared, thrown away afterwards.",
    },
    "sequence.evaluate": {
        "dataset_ids": "Id of the corpus with labels to score on.",
        "run_id": "Id of the run to score.",
    },
}


def explained(kind: str, schema: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """The JSON schema of a kind's config, its references in their places, with what fields mean as descriptions."""
    changed: dict[str, Any] = {}
    if "properties" in schema:
        changed["properties"] = {
            name: {**explained(kind, part, f"{within}{name}."), **_said(kind, f"{within}{name}")}
            for name, part in schema["properties"].items()
        }
    if "items" in schema:
        changed["items"] = explained(kind, schema["items"], within)
    if "anyOf" in schema:
        changed["anyOf"] = [explained(kind, part, within) for part in schema["anyOf"]]
    return {**schema, **changed}


def _said(kind: str, name: str) -> dict[str, str]:
    said = OWN[kind].get(name, SHARED.get(name))
    return {} if said is None else {"description": said}
