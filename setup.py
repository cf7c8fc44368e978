"Packaging, read from settings.ini so that nbdev and pip never disagree."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here/"settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license="Apache-2.0",
    license_files=["LICENSE", "LICENSE-PROSE"],
    keywords=cfg["keywords"].split(),
    packages=[*find_packages(include=[cfg["lib_name"], f"{cfg['lib_name']}.*"]),
              f"{cfg['lib_name']}.runs"],
    # the records that the lessons quote travel with the package
    package_dir={f"{cfg['lib_name']}.runs": "runs"},
    package_data={
        f"{cfg['lib_name']}.runs": ["*.json", "*.jsonl"],
        cfg["lib_name"]: [
            "_help.json", "py.typed", "*.pyi", "*/*.pyi", "*/*.csv",
            "starts/*.pt",    # encoders that have seen nobody
            "releases/*",  # networks of lesson 13, with their statements; a record that runs/ lacks
        ],
    },
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        "dev": [*cfg["dev_requirements"].split(), *cfg["hub_requirements"].split()],
        "hub": cfg["hub_requirements"].split(),
        "teach": cfg["teach_requirements"].split(),
        "docs": cfg["docs_requirements"].split(),
    },
    entry_points={"console_scripts": cfg["console_scripts"].split("\n")},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Security",
    ],
)
